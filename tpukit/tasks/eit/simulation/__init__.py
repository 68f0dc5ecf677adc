"""Simulated EIT samples: mesh, forward solver, data set writer."""
