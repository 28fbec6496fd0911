"""Files on local disks and object stores behind one interface, with retries and locks."""
