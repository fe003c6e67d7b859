// See __init__.py. Streamlit calls this again whenever `data` changes, and mostly the returned function before that.

const BEAT_MS = 200;
const SLOW_AFTER_MS = 4000; // then every third beat is sent
const ARRIVAL_MS = 2000; // a page of which no end has come after this long is asked for again
const STUCK_MS = 3000; // a run that seems to last longer than this may have ended unheard

/** Number of the last page that has arrived whole. */
const shownPage = () => Math.max(0, ...[...document.querySelectorAll(".page-end")].map((mark) => Number(mark.dataset.page)));

/** Whether a run is under way. A request in the instant in which it ends would cost what it has not delivered yet. */
const isRunning = () => document.querySelector("[data-test-script-state]")?.dataset.testScriptState === "running";

export default function ({ data, parentElement, setStateValue }) {
  const began = performance.now();
  let idleAt = began;
  let beats = 0;
  const stop = () => clearInterval(parentElement.pulse);
  stop();
  parentElement.pulse = setInterval(() => {
    if (!parentElement.isConnected) return stop();
    const now = performance.now();
    if (!isRunning()) idleAt = now;
    if (isRunning() && now - idleAt < STUCK_MS) return;
    const missing = shownPage() < data.page && now - began > ARRIVAL_MS;
    beats += 1;
    if (now - began > SLOW_AFTER_MS && beats % 3) return;
    if (data.busy || missing) setStateValue("beat", { page: shownPage(), number: Date.now() });
  }, BEAT_MS);
  return stop;
}
