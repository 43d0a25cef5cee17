//! Requests and the engines that run them.
