"""Numerics on ``[..., m, n]``; knows neither optax nor meshes."""
