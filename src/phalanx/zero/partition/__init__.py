"""Who owns which elements, where parameters live, and how the owned part is stepped and sent to all ranks."""
