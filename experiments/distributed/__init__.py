"""Several devices and processes: mesh, sharding, watchdog, preemption."""
