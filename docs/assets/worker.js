/* Browsers refuse workers to pages that are opened as files. The search then runs in a hidden frame in place of one. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow, script = source => new Promise((resolve, reject) => {
        const tag = inside.document.createElement("script")
        tag.src = source
        tag.onload = resolve
        tag.onerror = reject
        inside.document.body.append(tag)
      })
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => script(one)), Promise.resolve())
      this.ready = script(new URL(url, location.href).href)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() { this.frame.remove() }
  }
}
