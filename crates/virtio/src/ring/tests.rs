//! Both halves against each other, against a hostile driver, and against other people's device.

mod device;
mod hostile;
mod oracle;
mod packed;
mod random;
mod threads;
