"""Data sources: resolves `data.source` to files and readers of its format, from any file system.

source     resolves the setting to a kind, its files and the reader of its format
listing    lists the files of a path, glob, folder or URI; `streams` reads them, from any file system
text lines rows hub    readers of the formats; `fields` converts a row to a document
registry   registered data sets, the user's and built-in ones (`embedded`)
pieces     the units of a source: files, slices, parts;  `faults`: errors of files and documents
"""
