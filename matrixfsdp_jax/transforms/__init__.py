"""Optax transformations on trees of matrices; know no mesh."""
