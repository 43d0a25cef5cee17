//! Guest memory, rings and device models.
