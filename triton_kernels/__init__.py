"""One file an operation: formula, reference, kernels, registration, public function, in that order."""
