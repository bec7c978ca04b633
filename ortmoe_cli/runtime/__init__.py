"""What the installed runtime really does: which settings it knows, which providers load, what it makes of a model."""
