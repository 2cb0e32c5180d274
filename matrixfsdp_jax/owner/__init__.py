"""Owner parameters: a plan on a mesh, and transforms lifted onto it."""
