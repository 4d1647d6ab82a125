"""What drafts the tokens of a verify step (device/verify.py): prompt lookup, a model, first layers, an EAGLE-3 head."""
