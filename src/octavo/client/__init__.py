"""Who computes tokens: an engine in this process or in another, behind one protocol."""
