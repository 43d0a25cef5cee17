//! Both halves against each other, against a hostile driver, and against other people's device; and over the death of the device.

mod device;
mod hostile;
// Miri maps no files.
#[cfg(not(miri))]
mod inflight;
#[cfg(not(miri))]
mod log;
#[cfg(not(miri))]
mod oracle;
mod packed;
mod threads;
