#![cfg_attr(feature = "libfuzzer", no_main)]
#![allow(missing_docs)]

egret_fuzz::target!(nbd_handshake);
