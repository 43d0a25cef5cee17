//! The numbers and bits by which both sides of a vhost-user socket call things: those of QEMU's
//! `docs/interop/vhost-user.rst`. They are here because whoever serves a ring needs them, and whoever fills one.

macro_rules! requests {
    ($($request:ident = $number:literal,)*) => {
        /// Requests of the front-end.
        pub mod request {
            $(
                #[doc = concat!("`VHOST_USER_", stringify!($request), "`.")]
                pub const $request: u32 = $number;
            )*

            /// What a request is called; of one that is not in the list that it is one.
            pub const fn name(request: u32) -> &'static str {
                match request {
                    $($request => stringify!($request),)*
                    _ => "unknown request",
                }
            }
        }
    };
}

requests! {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    RESET_OWNER = 4,
    SET_MEM_TABLE = 5,
    SET_LOG_BASE = 6,
    SET_LOG_FD = 7,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SET_BACKEND_REQ_FD = 21,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
    SET_DEVICE_STATE_FD = 42,
    CHECK_DEVICE_STATE = 43,
    GET_VRING_BASE_SKIP_DRAIN = 45,
}

/// The back-end's own request that says that the configuration space has changed: `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

/// The virtio feature bit by which both sides agree on having protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// The feature bit by which a front-end has all that the back-end writes logged: `VHOST_F_LOG_ALL`.
pub const F_LOG_ALL: u64 = 1 << 26;

/// In SET_VRING_ADDR: what is written to the used ring is logged, too. `VHOST_VRING_F_LOG`, as a bit.
pub const VRING_LOG: u32 = 1;

/// Protocol features, as bits.
pub mod protocol_feature {
    /// More queues than one.
    pub const MQ: u64 = 1;
    /// The dirty log is in memory that the front-end hands over.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// A request may ask to be acknowledged.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back-end has requests of its own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The back-end has the configuration space.
    pub const CONFIG: u64 = 1 << 9;
    /// The front-end keeps a record of what is in flight.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// There is a request to reset the device.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory is added and removed region by region.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The back-end has a state, which moves with the guest.
    pub const DEVICE_STATE: u64 = 1 << 19;
    /// A ring may stop with requests in flight, which are in the front-end's record of them: it moves with the guest.
    pub const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
    /// A ring that is to stop so has a request of its own, and with the usual one it stops when all requests have ended.
    pub const GET_VRING_BASE_SKIP_DRAIN: u64 = 1 << 23;
}

/// Flags in a message's header.
pub mod flag {
    /// The version, which is in the lowest two bits.
    pub const VERSION: u32 = 1;
    /// It is a reply.
    pub const REPLY: u32 = 1 << 2;
    /// Its sender wants to hear how it went.
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// In a message that hands over a descriptor, of a vring say: there is none.
pub const NO_FD: u64 = 1 << 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU's headers and the specification write them, and not as they are written here.
    #[test]
    fn the_bits_are_those_of_the_protocol() {
        use protocol_feature::*;
        assert_eq!((F_PROTOCOL_FEATURES, F_LOG_ALL, VRING_LOG), (0x4000_0000, 0x400_0000, 1));
        assert_eq!([MQ, LOG_SHMFD, REPLY_ACK, BACKEND_REQ, CONFIG], [0x1, 0x2, 0x8, 0x20, 0x200]);
        assert_eq!([INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS], [0x1000, 0x2000, 0x8000]);
        assert_eq!(
            [DEVICE_STATE, GET_VRING_BASE_INFLIGHT, GET_VRING_BASE_SKIP_DRAIN],
            [0x8_0000, 0x10_0000, 0x80_0000]
        );
        assert_eq!([flag::VERSION, flag::REPLY, flag::NEED_REPLY], [1, 4, 8]);
        assert_eq!(NO_FD, 0x100);
        assert_eq!((request::name(request::ADD_MEM_REG), request::name(999)), ("ADD_MEM_REG", "unknown request"));
    }
}
