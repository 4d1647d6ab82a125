"""What drafts the tokens of a verify step (device/verify.py): prompt lookup, a smaller model, the first layers."""
