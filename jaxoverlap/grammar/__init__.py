"""Constrained output: JSON schemas, regular expressions and EBNF on llguidance. Imports no jax."""
