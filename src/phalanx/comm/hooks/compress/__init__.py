"""Hooks that send less than the gradient, and what they keep of it for the next step."""
