/* A Worker for pages that are opened from disk, where browsers refuse real ones: the worker's script runs in a hidden
 * iframe. mkdocs-material's search looks for the name IFrameWorker; over http the browser's own Worker is used. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const iframe = document.createElement("iframe");
      iframe.hidden = true;
      document.body.appendChild(iframe);
      this.iframe = iframe;
      this.receive = (event) => {
        if (event.source === iframe.contentWindow) {
          const copy = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(copy);
          if (this.onmessage) this.onmessage(copy);
        }
      };
      window.addEventListener("message", this.receive);
      const inside = iframe.contentWindow;
      this.ready = new Promise((resolve) => {
        inside.__ready = resolve;
        inside.__import = (urls) => urls.reduce((previous, each) => previous.then(() => new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          script.src = each;
          script.onload = loaded;
          script.onerror = failed;
          inside.document.body.appendChild(script);
        })), Promise.resolve());
        inside.document.open();
        inside.document.write(
          "<html><body><script>" +
          "var postMessage = function (data) { parent.postMessage(data, '*') };" +
          "var importScripts = function () { return __import(Array.from(arguments)) };" +
          "</script><script src='" + new URL(url, location.href).href + "'></script>" +
          "<script>__ready()</script></body></html>"
        );
        inside.document.close();
      });
    }
    postMessage(data) {
      this.ready.then(() => this.iframe.contentWindow.dispatchEvent(new MessageEvent("message", { data: data })));
    }
    terminate() {
      this.iframe.remove();
      window.removeEventListener("message", this.receive);
    }
  };
  window.Worker = window.IFrameWorker;
}
