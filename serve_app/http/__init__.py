"""HTTP below the routes: connections, body limits, browsers, SSE and the shape of errors."""
