"""The status page's style sheet, light and dark. Imports nothing and does nothing.

Blues and greens for blocks in turn, vermilion for waiting: Okabe and Ito's colours, as in `bench.figures`, lighter
where the ground is dark. No state is told by colour alone. Text has a contrast of 4.5 or more to its ground.
"""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--faint:#5f5f5f;--page:#fff;--card:#f7f7f5;--line:#dcdcd8;--track:#e8e8e4;
--odd:#0072b2;--even:#8cc1e3;--next-odd:#009e73;--next-even:#8fd6bf;--wait:#d55e00;--bad:#a84300;--good:#00694d}
@media(prefers-color-scheme:dark){:root{--ink:#ececea;--faint:#a9a9a6;--page:#121314;--card:#1b1d1f;--line:#383b3e;
--track:#2c2f32;--odd:#56b4e9;--even:#2a6490;--next-odd:#2cc298;--next-even:#1d6b55;--wait:#ff8a3d;--bad:#ff9d5c;
--good:#4fd1a9}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:75rem;background:var(--page);color:var(--ink);
font:1rem/1.45 system-ui,"DejaVu Sans",sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}h3{font-size:1.05rem;margin:0}
p,ul,dl,figure{margin:.35rem 0}ul{padding-left:1.2rem}li,p,dd,.name{overflow-wrap:anywhere}
.faint,.ends,.legend,figcaption,footer,summary{color:var(--faint);font-size:.85rem}footer{margin-top:1.6rem}
figcaption b{color:var(--ink)}
.defs{position:absolute;width:0;height:0}
.alert,.reason{border-left:.25rem solid var(--wait);padding:.4rem .7rem;background:var(--track)}
.cards{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,28rem),1fr))}
article{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem 1rem;min-width:0}
.state{display:inline-block;font-size:.8rem;font-weight:400;padding:0 .55rem;border:1px solid;border-radius:1rem;
vertical-align:.1em;color:var(--faint)}
.state.ready{color:var(--good)}.state.loading{border-style:dashed}.state.unavailable{color:var(--bad);font-weight:700}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(7.5rem,1fr));gap:.3rem .8rem}
dt{color:var(--faint);font-size:.8rem}dd{margin:0;font-variant-numeric:tabular-nums}.bad dd{color:var(--bad);
font-weight:700}
svg{display:block;width:100%}
.bar{height:1.6rem;background:var(--track)}.bar.thin{height:.7rem;margin-top:.15rem}
.curve{height:4.2rem;border-bottom:1px solid var(--faint);overflow:visible}
.reads{height:2.6rem}.work{height:2.2rem}.reads,.work{border-bottom:1px solid var(--faint)}
.curves{display:grid;gap:.2rem 1.2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,13rem),1fr))}
.timeline{display:grid;grid-template-columns:4.2rem 1fr;gap:.35rem .4rem;align-items:center}
.timeline span{font-size:.85rem;text-align:right;color:var(--faint)}
.ends{display:flex;justify-content:space-between;margin:.1rem 0 0;font-size:.75rem}.inset{margin-left:4.6rem}
.shares{list-style:none;padding:0}.shares li{margin:.5rem 0}
.key{display:inline-block;width:.6rem;height:.8rem;vertical-align:-.05rem}.key.floor{width:2px}
.legend span{display:inline-block;margin-right:1rem}.legend .key:last-of-type{margin-right:.35rem}
path.odd{fill:var(--odd)}path.even{fill:var(--even)}path.next-odd{fill:var(--next-odd)}
path.next-even{fill:var(--next-even)}path.wait{fill:url(#hatch)}path.none{fill:none}
.key.odd{background:var(--odd)}.key.even{background:var(--even)}.key.floor{background:var(--ink)}
.key.next-odd{background:var(--next-odd)}.key.next-even{background:var(--next-even)}
path.floor,path.line,path.predicted{fill:none;vector-effect:non-scaling-stroke}
path.floor{stroke:var(--ink);stroke-width:2}
path.line{stroke:var(--odd);stroke-width:2;stroke-linecap:round;stroke-linejoin:round}
path.predicted{stroke:var(--faint);stroke-dasharray:3 4}
path.hatch{fill:none;stroke:var(--wait);stroke-width:4}
path.stall{fill:var(--wait);fill-opacity:.35;stroke:var(--wait);vector-effect:non-scaling-stroke}
"""
