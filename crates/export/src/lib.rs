//! A disk on queues: vhost-user sessions and queue workers.
