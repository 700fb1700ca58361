"""Training runs that others published, predicted: how far off the estimates are on hardware that is not here."""
