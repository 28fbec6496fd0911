"""What a program needs of its machine: files and object stores, secrets, signals, output streams, memory and core limits."""
