"""An engine that computes nothing and takes as long as one would: for planning and for tests."""
