"""From a module on the meta device to one forward fx graph of the whole model."""
