"""Real routers, queues and scaling rules over engines that are numbers, in virtual time."""
