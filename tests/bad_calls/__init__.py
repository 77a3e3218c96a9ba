"""Public calls with arguments that cannot be right."""
