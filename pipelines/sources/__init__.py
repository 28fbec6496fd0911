"""Where documents come from: what `data.source` names, whatever its place and format.

source     from the setting to a kind, its files and the reader of its format
listing    the files that a path, glob, folder or URI stands for; `streams` reads them, from any file system
text lines rows hub    the formats; `fields` makes a document of a row
registry   data sets of your own, and those that every machine has (`embedded`)
pieces     a source divided: files, slices, parts;  `faults`: what can be wrong with it
"""
