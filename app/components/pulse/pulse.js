// See __init__.py. Streamlit calls this again whenever `data` changes, and mostly the returned function before that.

const BEAT_MS = 200;
const SLOW_AFTER_MS = 4000; // then every third beat is sent
const ARRIVAL_MS = 2000; // a page of which no end has come after this long is asked for again

export default function ({ data, parentElement, setStateValue }) {
  const shown = () => Math.max(0, ...[...document.querySelectorAll(".page-end")].map((mark) => Number(mark.dataset.page)));
  const began = performance.now();
  let beats = 0;
  const stop = () => clearInterval(parentElement.pulse);
  stop();
  parentElement.pulse = setInterval(() => {
    if (!parentElement.isConnected) return stop();
    const age = performance.now() - began;
    const missing = shown() < data.page && age > ARRIVAL_MS;
    beats += 1;
    if (age > SLOW_AFTER_MS && beats % 3) return;
    if (data.busy || missing) setStateValue("beat", { page: shown(), number: Date.now() });
  }, BEAT_MS);
  return stop;
}
