"""Exact top-k and certified probabilities over a table [V, d], at the speed of int8."""
