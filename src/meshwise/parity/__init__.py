"""What two runs must agree on: fingerprints, and the plain loop of the user."""
