// The search of a page that is opened as a file: such a page may start no worker, so the worker's script runs in a
// hidden frame of the page. The name of this file tells the theme's plugin `offline` that it has to load none of its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><title>search</title><body></body>");
      inside.document.close();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.ready = new Promise((loaded) => script.addEventListener("load", () => loaded(inside)));
      script.src = address;
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
