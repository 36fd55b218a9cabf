// A step for Ctrl+Z, if anything changed since the last one.
export function noteState(app) {
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  if (tracker?.captureCanvasState) tracker.captureCanvasState();
  else tracker?.checkState?.();
}
