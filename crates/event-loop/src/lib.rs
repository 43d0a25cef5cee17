//! One thread's turn: monitors, sources, mailbox, timers.
