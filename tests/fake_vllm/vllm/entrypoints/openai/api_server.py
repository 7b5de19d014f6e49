"""Starts a worker, then answers GET /health, and GET / with its arguments, environment and process ids.

--fake-ready-after-s S    answer 503 for that long
--fake-exit CODE          end before answering
--fake-stubborn           the worker ignores SIGTERM
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORKER = "import signal, time; {}print('up', flush=True); time.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN); "


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake-ready-after-s", type=float, default=0.0)
    parser.add_argument("--fake-exit", type=int)
    parser.add_argument("--fake-stubborn", action="store_true")
    args, _ = parser.parse_known_args()
    print("the fake server speaks", file=sys.stderr)
    if args.fake_exit is not None:
        sys.exit(args.fake_exit)

    code = WORKER.format(STUBBORN if args.fake_stubborn else "")
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    worker.stdout.readline()
    # As vLLM does: an orderly end takes the worker along. Killed, it leaves the worker behind.
    signal.signal(signal.SIGTERM, lambda signum, frame: (worker.terminate(), os._exit(0)))
    ready_at = time.monotonic() + args.fake_ready_after_s

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/" or time.monotonic() >= ready_at else 503)
            self.end_headers()
            state = {"argv": sys.argv[1:], "env": dict(os.environ), "pids": [os.getpid(), worker.pid]}
            self.wfile.write(json.dumps(state).encode())

        def log_message(self, *args: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
