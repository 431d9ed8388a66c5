"""Programs made executable."""
