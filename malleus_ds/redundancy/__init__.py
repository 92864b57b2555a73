"""Second copies of the training state in the memory of other nodes, and rebuilding a job from them."""
