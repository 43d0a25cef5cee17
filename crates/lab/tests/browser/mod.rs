//! A headless Chromium, driven over its DevTools protocol.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use tungstenite::{Message, WebSocket, client};

const PROGRAMS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// A browser with one page.
pub struct Browser {
    process: Child,
    socket: WebSocket<TcpStream>,
    session: Value,
    sent: u64,
    /// What the page complained of, and what it asked the network for.
    pub complaints: Vec<String>,
    _profile: TempDir,
}

/// The browser that is installed, if one is.
fn installed() -> Option<&'static str> {
    PROGRAMS.into_iter().find(|name| {
        let directories = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&directories).any(|directory| directory.join(name).is_file())
    })
}

impl Browser {
    /// Starts one with a window of that size, in pixels. Where none is installed the test says that it is skipped.
    pub fn start_or_skips(width: u32, height: u32) -> Option<Self> {
        let program = installed();
        if program.is_none() {
            egret_needs::this_test_lacks("Chromium");
        }
        program.map(|program| Self::start(program, width, height))
    }

    fn start(program: &str, width: u32, height: u32) -> Self {
        let profile = tempfile::tempdir().expect("a directory");
        let flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
                     --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0";
        let mut process = Command::new(program)
            .args(flags.split_whitespace())
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg(format!("--window-size={width},{height}"))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("Chromium starts");
        let mut lines = BufReader::new(process.stderr.take().expect("a pipe")).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("DevTools listening on ")?.1.to_owned()))
            .expect("an address");
        std::thread::spawn(move || lines.for_each(drop)); // it must not block on a full pipe
        let authority = address.trim_start_matches("ws://").split('/').next().expect("an authority");
        let stream = TcpStream::connect(authority).expect("a connection");
        let (socket, _) = client(&address, stream).expect("a web socket");
        let mut browser =
            Self { process, socket, session: Value::Null, sent: 0, complaints: Vec::new(), _profile: profile };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = browser.call("Target.attachToTarget", &attach)["sessionId"].clone();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Calls a method of the protocol, and listens to events meanwhile.
    pub fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.sent += 1;
        let mut message = json!({ "id": self.sent, "method": method, "params": parameters });
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        self.socket.send(Message::text(message.to_string())).expect("sent");
        loop {
            let answer = self.receive();
            if answer["id"] == self.sent {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
        }
    }

    fn receive(&mut self) -> Value {
        loop {
            if let Message::Text(text) = self.socket.read().expect("the browser lives") {
                let message: Value = serde_json::from_str(&text).expect("JSON");
                self.note(&message);
                return message;
            }
        }
    }

    fn note(&mut self, event: &Value) {
        let parameters = &event["params"];
        let url = parameters["request"]["url"].as_str().unwrap_or_default();
        let bad = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => parameters["type"] != "log",
            Some("Log.entryAdded") => matches!(parameters["entry"]["level"].as_str(), Some("error" | "warning")),
            Some("Network.requestWillBeSent") => !url.ends_with("/report.html") && !url.starts_with("data:"),
            _ => false,
        };
        if bad {
            self.complaints.push(parameters.to_string());
        }
    }

    /// Opens a file, and waits until it is loaded.
    pub fn open(&mut self, path: &Path) {
        self.call("Page.navigate", &json!({ "url": format!("file://{}", path.display()) }));
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'");
    }

    /// The value of an expression.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let ask = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", &ask);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression holds.
    pub fn wait(&mut self, expression: &str) {
        let promise = format!(
            "new Promise(done => {{ const end = Date.now() + 30000; const look = () => \
             {{ const holds = {expression}; holds || Date.now() > end ? done(!!holds) : setTimeout(look, 20); }}; look(); }})"
        );
        // A page that is being left takes its promises along.
        let ask = json!({ "expression": promise, "awaitPromise": true, "returnByValue": true });
        for _ in 0..3 {
            self.sent += 1;
            let id = self.sent;
            let message = json!({ "id": id, "method": "Runtime.evaluate", "params": ask, "sessionId": self.session });
            self.socket.send(Message::text(message.to_string())).expect("sent");
            let answer = loop {
                let answer = self.receive();
                if answer["id"] == id {
                    break answer;
                }
            };
            if answer["error"].is_null() {
                assert_eq!(answer["result"]["result"]["value"], true, "{expression}: {answer}");
                return;
            }
        }
        panic!("the page kept changing: {expression}");
    }

    /// Moves the mouse, or turns its wheel with Ctrl held.
    pub fn mouse(&mut self, kind: &str, x: f64, y: f64) {
        let wheel = kind == "mouseWheel";
        let event = json!({
            "type": kind, "x": x, "y": y, "deltaX": 0, "deltaY": if wheel { -240 } else { 0 }, "modifiers": if wheel { 2 } else { 0 },
        });
        self.call("Input.dispatchMouseEvent", &event);
    }

    /// Shows the page to a reader who likes it dark or light, and as on `print`, or else as on what it is on.
    pub fn show(&mut self, medium: &str, scheme: &str) {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call("Emulation.setEmulatedMedia", &json!({ "media": medium, "features": [feature] }));
    }

    /// Prints the page, and throws the paper away.
    pub fn print(&mut self) {
        self.call("Page.printToPDF", &json!({}));
    }

    /// Makes the window so wide and high, in pixels.
    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Clicks with the left button.
    pub fn click(&mut self, x: f64, y: f64) {
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            let button = if kind == "mouseMoved" { "none" } else { "left" };
            let event = json!({ "type": kind, "x": x, "y": y, "button": button, "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", &event);
        }
    }

    /// Where an element is in the window, once it was scrolled into it: left, top, width, height.
    pub fn bounds(&mut self, selector: &str) -> [f64; 4] {
        let bounds = self.evaluate(&format!(
            "(() => {{ const one = document.querySelector('{selector}'); \
             one.scrollIntoView({{ block: 'center', behavior: 'instant' }}); \
             const at = one.getBoundingClientRect(); return [at.left, at.top, at.width, at.height]; }})()"
        ));
        [0, 1, 2, 3].map(|index| bounds[index].as_f64().expect("a number"))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
