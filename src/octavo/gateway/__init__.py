"""Many servers behind one address: who answers, what happens when one does not."""
