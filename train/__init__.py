"""Target to features to head to exported head."""
