"""What jobs run on: devices, links and where each fact about them comes from."""
