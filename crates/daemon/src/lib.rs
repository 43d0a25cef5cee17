//! Objects (iothread, blockdev, export) and their one vocabulary.
