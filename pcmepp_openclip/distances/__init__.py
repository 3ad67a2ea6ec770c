"""Distances between Gaussians."""
