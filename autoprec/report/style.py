"""The page's style sheet; colours follow the reader's light or dark setting."""

from __future__ import annotations

CSS = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1c1d20;--soft:#62656c;--line:#e3e3df;--accent:#0b7a5c;--ref:#4b5563;--pre:#c2883a;
--find:#5b7bd5;--bad:#b4432f;--band:#9aa3b2}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e8e6;--soft:#9aa0a8;--line:#33373d;
--accent:#3fc79a;--ref:#c3c9d2;--pre:#e0aa5e;--find:#8fa8f0;--bad:#e5826f;--band:#6b7484}}
*{box-sizing:border-box}body{margin:0 auto;max-width:980px;padding:24px 18px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:20px;margin:0;color:var(--soft);font-weight:600}h2{font-size:17px;margin:0 0 6px}
p{margin:4px 0 10px}section,header{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:18px 20px;margin:14px 0}section>p{color:var(--soft)}
.verdict{font-size:21px;line-height:1.35;margin:6px 0}header.adopt .verdict strong{color:var(--accent)}
header.stay .verdict strong{color:var(--pre)}.facts{color:var(--soft)}
.tiles{display:flex;gap:12px;flex-wrap:wrap;margin-top:12px}.tiles div{flex:1;min-width:170px;padding:10px 14px;
border:1px solid var(--line);border-radius:8px}.tiles b{display:block;font-size:24px}.tiles span{color:var(--soft)}
.tiles small{display:block;color:var(--soft)}
.wide{overflow-x:auto;max-width:100%}p,li,dd,pre{overflow-wrap:anywhere}table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}td{white-space:nowrap}td:first-child{white-space:normal;min-width:9em}
td.text{white-space:normal;min-width:16em}.map td:first-child{white-space:nowrap}
tr.best td{color:var(--accent);font-weight:600}tr.reference td{font-weight:600}
figure{margin:0;overflow-x:auto}svg{width:100%;min-width:560px;height:auto;display:block}
svg text{fill:var(--soft);font-size:12px}svg text.label{font-size:11px}
svg text.label.best{fill:var(--accent);font-weight:600}svg text.note{font-size:11px}
svg text.axis{font-size:12.5px}
.grid{stroke:var(--line)}.zero{stroke:var(--soft)}.limit{stroke:var(--bad);stroke-dasharray:6 4}
.base{stroke:var(--ref);stroke-dasharray:8 3}
.floor{stroke:var(--soft);stroke-dasharray:2 4}.front{fill:none;stroke:var(--accent);stroke-width:1.5;opacity:.7}
.curve{fill:none;stroke-width:1.6}.curve.reference{stroke:var(--ref);stroke-width:5;opacity:.35}
.curve.best{stroke:var(--accent);stroke-width:2}.curve.thin{stroke-width:1.2}
.p0{--c:#c2883a}.p1{--c:#5b7bd5}.p2{--c:#b4432f}.p3{--c:#8a5fb8}.p4{--c:#2f9bb4}.p5{--c:#8f9a3c}
.curve.preset{stroke:var(--c)}.band{fill:var(--band);opacity:.35}
.dot{stroke:var(--card)}.dot.preset{fill:var(--pre)}.dot.search{fill:var(--find)}.dot.finalist{fill:var(--bad)}
.dot.best{fill:var(--accent)}
figcaption{color:var(--soft);font-size:13px}.key{margin-right:16px;display:inline-block}
.key i{display:inline-block;width:16px;height:4px;margin-right:6px;vertical-align:middle;border-radius:2px}
.key i.dot{width:10px;height:10px;border-radius:50%}.key i.dot.preset{background:var(--pre)}
.key i.curve.preset{background:var(--c)}.key i.none{display:none}
.key i.dot.search{background:var(--find)}.key i.dot.finalist{background:var(--bad)}
.key i.best{background:var(--accent)}.key i.curve.reference{background:var(--ref)}
.key i.band{background:var(--band);height:10px}
@media(max-width:600px){body{padding:8px 8px 40px}section,header{padding:12px 12px}.verdict{font-size:18px}}
pre{background:var(--bg);border:1px solid var(--line);border-radius:8px;padding:10px 12px;overflow-x:auto;
font-size:13px}
code{font-size:13px}dt{font-weight:600}dd{margin:0 0 8px;color:var(--soft)}summary{cursor:pointer}
.map td.f{font-size:12px;padding:3px 8px;border-bottom:2px solid var(--card);color:#111;white-space:nowrap}
.f-keep,.f-fp32,.f-tf32{background:#cfd4dc}
.f-bf16{background:#9cc7e8}.f-fp16{background:#b9b2ea}.f-fp8{background:#f3c26b}
.f-mxfp8{background:#f0a35e}.f-nvfp4{background:#e87f5f}.f-int8{background:#c9b37e}
.map td{vertical-align:middle}.share{position:relative;min-width:140px;overflow:hidden}
.share .bar{position:absolute;inset:4px auto 4px 0;background:var(--band);opacity:.35}
.share span{position:relative;padding-left:6px}
.heat td.h{color:#111;text-align:right;padding:3px 8px}
"""
