// See __init__.py. Streamlit calls this again whenever `data` changes, and mostly the returned function before that.

const BEAT_MS = 200;
const SLOW_AFTER_MS = 4000; // then, or at once when patient, every third beat is sent

const isRunning = () => document.querySelector("[data-test-script-state]")?.dataset.testScriptState === "running";

export default function ({ data, parentElement, setStateValue }) {
  const began = performance.now();
  let beats = 0;
  const stop = () => clearInterval(parentElement.pulse);
  stop();
  if (!data.busy) return stop;
  parentElement.pulse = setInterval(() => {
    if (!parentElement.isConnected) return stop();
    if (isRunning()) return;
    beats += 1;
    if ((!data.patient && performance.now() - began < SLOW_AFTER_MS) || beats % 3 === 0) setStateValue("beat", Date.now());
  }, BEAT_MS);
  return stop;
}
