"""JavaScript that `front_end` runs in the page of ComfyUI's front end, as functions for ``page.evaluate``."""

from __future__ import annotations

# Runs before the page's own scripts. Placeholders that shimmer while a picture loads take a whole processor where there
# is no GPU, and a dialog that still fades in takes no click.
NO_MOTION = """document.addEventListener('DOMContentLoaded', () => {
    const style = document.createElement('style');
    style.textContent = '*, *::before, *::after { animation: none !important; transition: none !important; }';
    document.head.append(style);
})"""
# The extensions are set up, the first workflow is loaded, and nothing blocks the page.
READY = """() => Boolean(window.app?.vueAppReady && app.extensionManager?.workflow?.activeWorkflow
    && document.querySelector('.resolute-badge') && !document.querySelector('.p-blockui-mask'))"""
# Resolves once the canvas is drawn anew and nothing on the screen has moved for some frames: nodes in both renderers,
# the view and the dialogs.
STABLE = """() => new Promise((resolve, reject) => {
    let last = '', same = 0;
    const late = performance.now() + 60000;
    let drawn = false;
    app.canvas.setDirty(true, true);
    const look = () => {
        const elements = [...document.querySelectorAll('[data-node-id], [role=dialog], .resolute-panel')].map(e => {
            const box = e.getBoundingClientRect();
            return [box.x, box.y, box.width, box.height].map(Math.round);
        });
        const {scale, offset} = app.canvas.ds;
        const nodes = app.graph.nodes.map(node => [...node.pos, ...node.size].map(Math.round));
        const now = JSON.stringify([nodes, elements, scale, [...offset]]);
        drawn ||= !app.canvas.dirty_canvas && !app.canvas.dirty_bgcanvas;
        same = now === last && drawn ? same + 1 : 0;
        last = now;
        if (same >= 6) resolve();
        else if (performance.now() > late) reject(new Error('The page still moves after a minute: ' + now));
        else requestAnimationFrame(look);
    };
    look();
})"""
# True once Nodes 2.0 has drawn each node, or the classic renderer none of them.
DRAWN = "vue => document.querySelectorAll('[data-node-id]').length === (vue ? app.graph.nodes.length : 0)"
CLOSE_OTHERS = """async () => {
    const {openWorkflows, activeWorkflow, closeWorkflow} = app.extensionManager.workflow;
    for (const each of [...openWorkflows]) if (each !== activeWorkflow) await closeWorkflow(each);
}"""
OPENED = """([name, count]) => Boolean(
    app.extensionManager.workflow.activeWorkflow?.path?.includes(name) && app.graph.nodes.length === count)"""
DROP = """async ([text, name]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, {type: 'application/json'}));
    const target = document.querySelector('canvas#graph-canvas');
    target.dispatchEvent(new DragEvent('drop', {
        dataTransfer: data, bubbles: true, cancelable: true}));
}"""
COMMAND = "name => app.extensionManager.command.execute(name)"
SETTING = "([name, value]) => app.extensionManager.setting.set(name, value)"
# True if the search dialog lists a node, and if it lists it first.
LISTED = """title => [...document.querySelectorAll('#results-list [role=option]')]
    .some(e => e.innerText.split('\\n')[0] === title)"""
FIRST = "title => document.querySelector('#results-list [role=option]')?.innerText.split('\\n')[0] === title"
# Boxes of all nodes with their titles, in the graph's units, as the renderer in use draws them: name, left, top, right,
# bottom.
BOXES = """() => {
    const {scale, offset} = app.canvas.ds, canvas = app.canvas.canvas.getBoundingClientRect();
    const drawn = new Map([...document.querySelectorAll('[data-node-id]')].map(e => [e.dataset.nodeId, e]));
    return app.graph.nodes.map(node => {
        const element = drawn.get(String(node.id)), [x, y] = node.pos;
        const [width, height] = node.flags.collapsed ? [node._collapsed_width ?? 0, 0] : node.size;
        if (!element) return [node.title, x, y - 30, x + width, y + height];
        const box = element.getBoundingClientRect();
        const at = (value, axis, origin) => (value - origin) / scale - offset[axis];
        return [node.title, at(box.left, 0, canvas.left), at(box.top, 1, canvas.top),
                at(box.right, 0, canvas.left), at(box.bottom, 1, canvas.top)];
    });
}"""
# Titles of nodes that stick out of a group.
OUTSIDE_GROUPS = f"""() => ({BOXES})().filter(([, left, top, right, bottom]) =>
    app.graph.groups.some(({{pos: [x, y], size: [width, height]}}) =>
        left < x + width && right > x && top < y + height && bottom > y
        && !(left >= x && right <= x + width && top >= y && bottom <= y + height))).map(([title]) => title)"""
# What the text widget of each of our nodes shows, by the node's title.
TEXTS = """() => Object.fromEntries(app.graph.nodes.map(n => [n.title,
    n.widgets?.find(w => w.name === '$$node-text-preview')?.element?.innerText])
    .filter(([, text]) => text !== undefined))"""
# How many pictures a node shows, by its title.
PICTURES = """() => Object.fromEntries(app.graph.nodes.map(n => [n.title,
    (app.nodeOutputs[n.id]?.images ?? []).length]).filter(([, count]) => count))"""
# True once each node that made a picture shows it: the page loads it from the server after the prompt's end.
PICTURES_SHOWN = """() => app.graph.nodes.every(n => n.flags.collapsed || !app.nodeOutputs[n.id]?.images?.length
    || (document.querySelector(`[data-node-id="${n.id}"] img`) ?? n.imgs?.[0])?.complete)"""
# Texts that are cut off although nothing can be scrolled.
CUT = """() => [...document.querySelectorAll('.resolute-text, .resolute-panel *, .resolute-badge')].filter(e =>
    e.innerText?.trim() && e.checkVisibility() && !['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 2) && e.clientWidth > 0
    && getComputedStyle(e).display !== 'inline').map(e => e.className + ': ' + e.innerText.slice(0, 80))"""
SET_WIDGETS = """values => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) {
    const value = values[`${node.comfyClass}.${widget.name}`];
    if (value === undefined) continue;
    widget.value = value;
    widget.callback?.(value);
} }"""
WATCH = """() => {
    window.resoluteEnd = null;
    window.resoluteTexts = [];
    if (window.resoluteWatched) return;
    window.resoluteWatched = true;
    for (const name of ['execution_success', 'execution_error', 'execution_interrupted'])
        app.api.addEventListener(name, e => { window.resoluteEnd = {name, detail: e.detail}; });
    app.api.addEventListener('progress_text', e => window.resoluteTexts.push(e.detail.text));
}"""
PLACE = """classes => {
    app.graph.clear();
    const bottoms = [0, 0, 0];
    classes.forEach((name, index) => {
        const node = LiteGraph.createNode(name);
        const column = index % 3;
        app.graph.add(node);
        node.pos = [column * 500, bottoms[column] + 40];
        bottoms[column] += node.size[1] + 120;
    });
    app.canvas.ds.scale = 0.75;
    app.canvas.ds.offset = [540, 170];
}"""
# Where on the screen a socket is: ([node, is it an output, slot]).
SOCKET = """([id, out, slot]) => {
    const element = document.querySelector(`[data-node-id="${id}"]`);
    if (element) {
        const sockets = element.querySelectorAll(out ? '.lg-slot--output' : '.lg-slot--input');
        const box = sockets[slot].querySelector('[data-slot-key]').getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    }
    const node = app.graph.getNodeById(id), [x, y] = out ? node.getOutputPos(slot) : node.getInputPos(slot);
    const box = app.canvas.canvas.getBoundingClientRect(), {scale, offset} = app.canvas.ds;
    return [(x + offset[0]) * scale + box.left, (y + offset[1]) * scale + box.top];
}"""
# Where on the screen the title of a node is, in the classic renderer.
TITLE = """title => {
    const {pos: [x, y]} = app.graph.nodes.find(node => node.title === title);
    const box = app.canvas.canvas.getBoundingClientRect(), {scale, offset} = app.canvas.ds;
    return [(x + 40 + offset[0]) * scale + box.left, (y - 15 + offset[1]) * scale + box.top];
}"""
# Ids and slots of a link by names: ([from, output, to, input]). A node is named by its title.
ENDS = """([from, output, to, input]) => {
    const named = title => app.graph.nodes.find(n => n.title === title);
    const source = named(from), target = named(to);
    return [source.id, source.outputs.findIndex(o => o.name === output),
            target.id, target.inputs.findIndex(i => i.name === input)];
}"""
LINK = """([source, output, target, input]) => {
    app.graph.getNodeById(source).connect(output, app.graph.getNodeById(target), input);
}"""
LINKED = """([source, output, target, input]) => {
    const link = app.graph.getLink(app.graph.getNodeById(target).inputs[input].link);
    return Boolean(link) && link.origin_id == source && link.origin_slot === output;
}"""
CONTRAST = """selector => {
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const element = document.querySelector(selector);
    let behind = element;
    while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const pair = [getComputedStyle(element).color, getComputedStyle(behind ?? document.body).backgroundColor];
    const [one, other] = pair.map(text => light(rgb(text))).sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
}"""
# Texts of all dialogs and of the overlay that reports missing nodes or models.
COMPLAINTS = """() => {
    const shown = '[role=dialog], [role=alertdialog], [data-testid=error-overlay]';
    return [...document.querySelectorAll(shown)].map(e => e.innerText.trim());
}"""
UNKNOWN_TYPES = """() => app.graph.nodes.map(n => n.type)
    .filter(type => !(type in LiteGraph.registered_node_types))"""
