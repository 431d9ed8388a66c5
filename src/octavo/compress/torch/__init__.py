"""Methods that need gradients; torch is in the extra `torch`."""
