"""What strangers wrote runs here: in processes that the system limits and that can be killed."""
