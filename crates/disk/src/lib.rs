//! Requests and the engines that run them.

mod request;

pub use request::{Completion, IoVec, Op, Request, Token};
