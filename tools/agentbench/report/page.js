'use strict';
(() => {
  const tip = document.getElementById('tip');
  const show = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
    tip.style.left = Math.max(8, x) + 'px';
    tip.style.top = y + 'px';
  };
  const hide = () => { tip.hidden = true; };
  document.querySelectorAll('[data-tip]').forEach((mark) => {
    mark.addEventListener('pointermove', (event) => show(event, mark.dataset.tip));
    mark.addEventListener('pointerleave', hide);
  });

  const hidden = new Set();
  const size = (mib) => mib >= 1024 ? (mib / 1024).toFixed(2) + ' GiB' : mib.toFixed(mib < 100 ? 1 : 0) + ' MiB';
  document.querySelectorAll('svg[data-hover]').forEach((svg) => {
    const h = JSON.parse(svg.dataset.hover);
    const cursor = document.createElementNS('http://www.w3.org/2000/svg', 'line');
    cursor.setAttribute('class', 'cursor hidden');
    cursor.setAttribute('y1', h.top);
    cursor.setAttribute('y2', h.top + h.height);
    svg.append(cursor);
    svg.addEventListener('pointermove', (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const part = (x - h.left) / h.width;
      if (part < 0 || part >= 1) {
        cursor.classList.add('hidden');
        hide();
        return;
      }
      cursor.classList.remove('hidden');
      cursor.setAttribute('x1', x);
      cursor.setAttribute('x2', x);
      const lines = [(part * h.max).toFixed(1) + ' s'];
      for (const s of h.series) {
        const v = s.values[Math.floor(part * s.values.length)];
        if (v !== null && !hidden.has(s.class)) lines.push(s.name + ': ' + size(v));
      }
      show(event, lines.join('\n'));
    });
    svg.addEventListener('pointerleave', () => { cursor.classList.add('hidden'); hide(); });
  });

  // The legend switches systems off and on in all charts.
  document.querySelectorAll('.legend button').forEach((button) => {
    button.addEventListener('click', () => {
      const name = button.dataset.system;
      const off = !hidden.delete(name);
      if (off) hidden.add(name);
      button.setAttribute('aria-pressed', String(!off));
      document.querySelectorAll('svg .' + name).forEach((mark) => mark.classList.toggle('hidden', off));
    });
  });

  // Of several numbers of clones, one is shown; all of them without a script.
  const choose = (section, clones) => {
    section.querySelectorAll('.charts').forEach((c) => c.classList.toggle('off', c.dataset.clones !== clones));
    section.querySelectorAll('.tabs button').forEach((b) => b.setAttribute('aria-pressed', String(b.dataset.clones === clones)));
  };
  document.querySelectorAll('.figures').forEach((section) => {
    const tabs = section.querySelectorAll('.tabs button');
    tabs.forEach((b) => b.addEventListener('click', () => choose(section, b.dataset.clones)));
    if (tabs.length) choose(section, tabs[0].dataset.clones);
  });
})();
